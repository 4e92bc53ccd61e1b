"""predict: what stored runs or published figures say of other settings."""
