"""What conversion costs, measured against `cp` and `import torch` on the same machine."""
