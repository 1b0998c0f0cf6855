"""Processes and their messages: how they are started, asked, timed and ended. Nothing is evaluated here."""
