"""Families: what a layer computes, and what is right. A family is one ``Family``; everything else asks ``family_of``.

``softmax`` is attention over visible keys. The package of a family holds all of it; modes, graphs, poison, isolation
and reports know none. A family never learns a backend's name.
"""
