"""Tests of vision encoders against transformers' own."""
