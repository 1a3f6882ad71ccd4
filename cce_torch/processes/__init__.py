"""Several processes that share a vocabulary or a mesh."""
