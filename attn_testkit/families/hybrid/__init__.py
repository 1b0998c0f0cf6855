"""Models in which layers that keep a state alternate with softmax layers.

``family.HYBRID`` is the family. It makes two cases of one, with the layers of each kind, and joins what their families
say.
"""
