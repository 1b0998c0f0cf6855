"""Tensors of a step that belong to features of cases: each module has ``TENSORS``, and no list names them."""
