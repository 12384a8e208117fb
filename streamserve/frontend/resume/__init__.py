"""Streams that outlive their connections: their events are kept, and whoever comes back gets the rest."""
