"""The contract of a backend whose layers keep a recurrent state for each request."""

from __future__ import annotations

from abc import abstractmethod

import torch

from .backend import AttentionBackend
from .batch import ForwardBatch
from .state_layer import StateLayer
from .state_pool import StateInput

__all__ = ["StateBackend"]


class StateBackend(AttentionBackend):
    """One backend of recurrent layers, as a server runs it: planned, captured and replayed as an attention backend.

    ``context.state`` has the layers, the pool of states and the request table's states; ``batch.state`` the slots of a
    step. The KV pool has no layers. Declare ``Capabilities.state``.
    """

    @abstractmethod
    def forward(  # type: ignore[override]  # the activations of such a layer are others
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Update window and state of each request of the batch, row by row, and return what each row reads.

        ``mixed`` [T, C], ``a`` and ``b`` as ``StateLayer`` lists them, in the model's dtype, possibly strided views of
        one packed tensor; none may be modified. Memory past their last row may hold anything, NaN included. Returns
        [T, Hv, V] (or [T, Hv * V]) in the model's dtype.

        Rows of request i are those of the mode: one in decode, ``extend_seq_lens[i]`` in extend. The state is that of
        slot ``batch.state.indices[i]``, and is stored there. In extend a request whose ``has_initial_state`` is False
        begins from zeros: its slot may hold anything, NaN included. Every other slot holds NaN, and must be neither
        read nor written.

        In target-verify each request has N rows: a chain, or if ``State.trees`` has the layer's kind, a tree. Its links
        are ``batch.spec_info.retrieve_next_token`` and ``retrieve_next_sibling``; a node continues the state of its
        parent, and its convolution the inputs of its ancestors. The state of a slot does not change; window and state
        after each node go to ``pool.scratch``, in the row of the request's position in the batch. ``commit`` follows. A
        plain step (decode or extend) after an accepted draft begins from the slot, in which ``commit`` has stored what
        follows the last accepted node.

        With rollback ``slots`` or ``slots_in_decode`` there is no commit. Request i has N slots, ``indices[i]``. The
        state before its rows is that of slot ``indices[i, num_accepted[i] - 1]``, and the state after row t is stored
        in slot ``indices[i, t]``. Its window is in the first of them, ``conv[indices[i, 0]]``, W - 1 + N - 1 columns:
        the window before the rows begins at column ``num_accepted[i] - 1``. After the step the columns hold the last
        W - 2 inputs of that window and the N new ones, so the window after row t begins at column t.

        With ``slots_moved`` the step is that of ``slots``, and ``commit`` follows. So each step finds the state in the
        first slot, with a ``num_accepted`` of 1, also after a longer draft.

        With ``slots_in_decode`` a decode has the list and ``num_accepted``, too. It continues the last draft as a
        verify of a single row does: state and window before it are those of the last accepted node. Those after it are
        stored in the first slot, the window from column 0 on; the other slots do not change.

        Any other plain step of such an instance gets no ``num_accepted``. It reads and stores the state in the first
        slot, and the window from column 0 on. So it continues a draft only if one node, the root, was accepted. After a
        longer draft the server must move state and window there first, or run a target-verify; the kit runs no such
        step of a request that has a verified draft.

        With ``StateContext.conv_windows`` ``taps_first`` a window has columns after the W - 1, which are neither read
        nor written. With ``newest_last`` the last W - 1 of its columns are those inputs, the columns before them are
        older inputs, and after the step all of them are the last inputs. A fresh request has zeros before its first
        row.

        If ``batch.state.sources`` is given, in decode and extend, the window and the state before the rows are those of
        slot ``sources[i]``, which is not written unless it is ``indices[i]``.

        If ``batch.state.snapshot`` is given, in decode and extend, window and state after ``rows[i]`` rows of request
        i are also stored in slot ``slots[i]``.
        """

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Make window and state after the last accepted node of each draft those of its slot, in all layers.

        With rollback ``slots_moved`` the state is that of slot ``indices[i, steps[i]]``, and is copied to ``indices[i,
        0]``. The window begins at column ``steps[i]`` of that first slot, and is moved to column 0 there: both ranges
        overlap. Other slots do not change, and columns after the window may hold anything.

        Called after acceptance, outside of any graph: device work only. ``steps`` [bs] int32: index of that node, 0
        being the root; -1: nothing is stored, as for padded requests. ``state``: that of the verify's batch, with the
        ``snapshot`` that follows from what was accepted.
        """
        raise NotImplementedError(f"{type(self).__name__} declares target-verify but does not define commit")
