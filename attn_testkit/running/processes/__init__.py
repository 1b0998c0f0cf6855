"""Processes and what they say to each other: started, asked, timed, ended. Judges nothing."""
