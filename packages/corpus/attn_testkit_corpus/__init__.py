"""Tests of attn-testkit itself: broken, known-good and adversarial backends, mutants, and a real GPU's answers."""
