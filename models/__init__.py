"""Models written for one device, in plain PyTorch: nothing here knows about Whale."""
