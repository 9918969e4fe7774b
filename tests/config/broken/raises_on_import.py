"""A plug-in with a mistake."""

raise RuntimeError("the flux capacitor is missing")
