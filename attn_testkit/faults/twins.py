"""Healthy backends that differ from one another in the ways in which good backends legitimately do."""
