"""Evaluations that can be compared: published protocols, two policies on the same episodes, results as files.

- `protocols`: what a protocol fixes, read from the YAML files beside it; quick to import
- `statistics`: the difference of two success rates on paired episodes
- `study`: plays them
- `results`: tables and results.json
"""
