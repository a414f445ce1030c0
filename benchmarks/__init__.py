"""Costs of conversion, measured against `cp` and `import torch` on the same machine."""
