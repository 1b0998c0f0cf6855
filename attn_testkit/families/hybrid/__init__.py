"""Models in which layers that keep a state alternate with softmax layers.

``family.HYBRID`` is the family. It splits a case into two, with the layers of each kind, and joins the results of their
families.
"""
