"""What a model, a leaf and a request are: frozen records, which the rest of the tree reads."""
