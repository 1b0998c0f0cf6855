"""Families: the computation of a layer, and its right results. A family is one ``Family``, and each layer
of a case has one: ``by_layer.py`` asks them all.

``softmax`` is attention over visible keys. Everything about a family is in its package; modes, graphs, poison,
isolation and reports import no family. A family never gets a backend's name.
"""
