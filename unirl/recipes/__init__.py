"""Recipes: an algorithm's pieces put together into a Plan. Each is a module with `Config` and
`plan`.
"""
