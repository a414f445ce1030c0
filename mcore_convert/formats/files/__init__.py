"""Files that formats are made of: safetensors, torch archives, pickles."""
