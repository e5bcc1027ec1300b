"""Draft sources, token trees and their verification. Empty so far: nothing here is speculative."""
