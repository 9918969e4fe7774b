"""RECAP: advantage-conditioned policies (Physical Intelligence 2025)."""
