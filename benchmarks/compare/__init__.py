"""This checkout compared with another one."""
