"""Text to token ids and back: pure, with no socket, clock or event loop inside."""
