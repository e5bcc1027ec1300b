"""Tests of vision towers against transformers' own."""
