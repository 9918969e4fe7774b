"""Negative-aware fine-tuning of flow policies (DiffusionNFT, Zheng et al. 2025)."""
