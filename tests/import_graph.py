"""Who imports whom among the modules of the product, and cycles in that graph."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def imports_of(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Imported modules by importing module; both by dotted name, a package under its `__init__`. Imports of any kind count.

    A name imported from a package with a face counts as an import of that `__init__`, which imports its modules in turn.
    """
    packages = {name.removesuffix(".__init__"): name for name in modules if name.endswith(".__init__")}
    graph: dict[str, list[str]] = {}
    for name, tree in modules.items():
        found: dict[str, None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                wanted = [
                    full if full in modules or full in packages else node.module
                    for full in (f"{node.module}.{alias.name}" for alias in node.names)
                ]
            else:
                continue
            for each in wanted:
                target = packages.get(each, each)
                if target in modules and target != name:
                    found[target] = None
        graph[name] = list(found)
    return graph


def cycles(graph: Mapping[str, list[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not. Tarjan's strongly connected components, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for root in graph:
        if root in index:
            continue
        path = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while path:
            module, rest = path[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    path.append((target, iter(graph[target])))
                    break
                if target in on_stack:
                    low[module] = min(low[module], index[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[module])
                if low[module] == index[module]:
                    group = []
                    while not group or group[-1] != module:
                        group.append(stack.pop())
                        on_stack.discard(group[-1])
                    if len(group) > 1:
                        found.append(sorted(group))
    return found
