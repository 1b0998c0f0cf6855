"""Models with layers that keep a state and softmax layers, in turn: each kind is that of its own family.

``family.HYBRID`` is the family. Of a case it makes two, one of the layers of each kind, and joins what their families
say.
"""
