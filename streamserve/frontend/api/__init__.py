"""The HTTP face: routes, request schema, responses, errors."""
