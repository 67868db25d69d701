"""Ways to run a model that cannot take a pack of several sequences: see docs/models.md."""
