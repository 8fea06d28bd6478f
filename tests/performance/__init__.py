"""Tests of clipstream.performance."""
