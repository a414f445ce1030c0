"""File types that formats consist of: safetensors, torch archives, pickles."""
