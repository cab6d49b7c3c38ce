"""`python -m ddtree_lab` is the same as `ddtree-lab`."""

from ddtree_lab.cli import main

raise SystemExit(main())
