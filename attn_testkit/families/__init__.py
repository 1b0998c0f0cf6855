"""Families: what a layer computes, and what is right. A family is one ``Family``; everything else asks ``family_of``.

``softmax`` is attention over visible keys. What a family is made of stands in its package; modes, graphs, poison,
isolation and reports know none. A family never learns a backend's name.
"""
