"""Prompts: read, checked, templated, tokenised once, and put into an order that a step number alone determines."""
