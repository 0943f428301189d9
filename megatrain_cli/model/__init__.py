"""What is trained: names, shapes, layouts, and a model's own layers without weights."""
