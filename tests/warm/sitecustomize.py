"""On the path of the processes that tests start: a judge that one of them starts is forked, as ``warm_judge`` says."""

import os
import sys

if "ATTN_WARM_JUDGES" in os.environ:
    from importlib.abc import MetaPathFinder
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    class _Judges(MetaPathFinder):
        """Waits for the module that starts judges, and then leaves."""

        NAME = "attn_testkit.running.processes.judge_process"

        def find_spec(self, name, path, target=None):
            if name != self.NAME:
                return None
            sys.meta_path.remove(self)
            spec = find_spec(name)
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                # From next to this file: others set the path anew.
                spec = spec_from_file_location("warm_judge", os.path.join(os.path.dirname(__file__), "warm_judge.py"))
                warm_judge = module_from_spec(spec)
                spec.loader.exec_module(warm_judge)
                module.subprocess = warm_judge.namespace()

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _Judges())
