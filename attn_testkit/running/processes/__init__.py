"""Processes and their messages: started, asked, timed, ended. Evaluates nothing."""
