"""A crowd of strangers at the ports of a real relay: connections that send nothing, write slowly, or send random bytes.

The relay's processes must not end or grow, and its members must be served meanwhile.
"""
