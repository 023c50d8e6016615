"""The EMA teacher."""
