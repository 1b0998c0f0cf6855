"""Functions that run a backend in each runner mode, eager and under CUDA graphs. One file per mode; the rest is shared.

``harness`` is the server around one backend instance. ``eager`` runs one step on it and ``graphs`` a schedule of
replays, made of ``capture`` and ``replay``; both return observations, and raise ``RunError`` (``errors``) for
whatever the backend raises. A mode is a ``ModeRunner``; ``drivers`` is the table of them.

Letters in shapes: T rows of a step, bs requests, N rows per request, L layers, Hq and Hk heads of queries and keys, Dqk
and Dv their dimensions.
"""
