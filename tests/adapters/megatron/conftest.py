"""Tests whose bodies run on ranks. Their modules import Megatron, which takes seconds: here they are read alone."""

import ast

import pytest

from tests.adapters.megatron.forked_ranks import WorkersError, run


def pytest_pycollect_makemodule(module_path, parent):
    if "\n@on_ranks(" in module_path.read_text():
        return Bodies.from_parent(parent, path=module_path)
    return None


class Bodies(pytest.File):
    """A module of which every test is decorated with `on_ranks`."""

    def collect(self):
        for node in ast.parse(self.path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Body.from_parent(self, name=node.name, node=node)


class Body(pytest.Item):
    """A test that is run on ranks; its marks are written without arguments."""

    def __init__(self, *, node, **given):
        super().__init__(**given)
        self.line, self.ranks = node.lineno, None
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call):
                [argument] = decorator.args
                self.ranks = ast.literal_eval(argument)
            else:
                self.add_marker(decorator.attr)
        assert self.ranks, f"{self.nodeid} has no on_ranks"

    def runtest(self):
        run(f"{self.path.stem}.{self.name}", ranks=self.ranks)

    def repr_failure(self, excinfo):
        return str(excinfo.value) if isinstance(excinfo.value, WorkersError) else super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, self.line, self.name
