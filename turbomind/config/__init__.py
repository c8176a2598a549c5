"""What an engine gets: devices, options, its share of memory, limits of files and tasks,
and facts that follow from a configuration.

Not here: the configuration of a model (`turbomind.models`), and what an engine does with what it
gets (`turbomind.engine`).
"""
