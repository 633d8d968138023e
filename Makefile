# What a person types. Everything that a machine needs is installed by `scripts/setup`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
CARGO ?= cargo
export CARGO_TERM_COLOR ?= auto

.PHONY: help setup build release demo test dist test-dist test-packages test-upgrade test-first-cluster test-monitoring test-examples kubernetes clients schemathesis verify audit sim explore fuzz-etcd fuzz mutants campaign bench bench-discovery bench-replacement clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing (Debian packages; needs root for that)
	@scripts/setup

build: setup ## build everything, development profile
	$(CARGO) build --workspace --locked

release: setup ## build the three programs in release mode
	$(CARGO) build --release --workspace --bins --locked

demo: release ## three hosts become one secure cluster, whose members then change (KEEP=1 leaves it running)
	@target/release/demo $(if $(KEEP),--keep)

test: ## every test: unit, store, simulation, exploration, end to end
	@scripts/setup tests
	@scripts/test

kubernetes: release ## Kubernetes' own tests of its storage, on muster-node: SERVER=… for another program, ARGS='-run …' (needs Go)
	@scripts/test-kubernetes $(ARGS)

clients: release ## etcd's own test suites on muster-node, an hour or more: SUITE=common|e2e|robustness; SERVER=… for another program, ONLY='^TestCtlV3' for some (needs Go)
	@for suite in $(or $(SUITE),common e2e robustness); do scripts/test-etcd $$suite $(if $(ONLY),'$(ONLY)') || failed="$$failed $$suite"; done; \
	  [ -z "$$failed" ] || { echo "make clients: failed:$$failed"; exit 1; }

schemathesis: release ## requests made from the OpenAPI description by schemathesis, to the discovery service: TIME=600 SEED=7 (needs Python)
	@TIME=$(TIME) SEED=$(SEED) scripts/test-schemathesis $(ARGS)

dist: ## static programs, Debian packages, checksums and a list of what they are built from, in target/dist-out (needs rustup, musl-tools, jq)
	@scripts/dist

test-dist: ## the release files twice, with equal bytes; the container images, run without a daemon (root; what dist needs, skopeo, umoci, runc, etcd-client; BUILD=no: what the last run built)
	@scripts/test-dist

test-packages: ## install the packages of `make dist` in a container that boots systemd, and live with them: SUITE=trixie (root; systemd-container, debootstrap)
	@scripts/test-packages $(SUITE)

test-upgrade: ## a cluster and its service go from an older version to this one and back, while a client writes: FROM=COMMIT (built once)
	@scripts/test-upgrade $(FROM)

test-first-cluster: ## run each command of docs/first-cluster.md on five machines that boot a bare Debian in containers: SUITE=trixie (root; systemd-container, debootstrap)
	@scripts/test-first-cluster $(SUITE)

test-monitoring: ## alert rules, their tests, the runbook and the dashboard, with promtool (Debian's packages are unpacked if it is missing)
	@scripts/test-monitoring

test-examples: ## check the examples for Terraform and Ansible with ansible-lint, checkov, cloud-init's schema and others (python3-venv)
	@scripts/test-examples

verify: ## what a reviewer runs: unused dependencies, each crate on its own, the release build's lints, then the tests (with format, lints, docs)
	@scripts/setup verify
	$(CARGO) machete
	for crate in muster-files muster-checks member-rules muster-identity muster-jws muster-manual muster-notify muster-shares muster-tls managed-postgres muster-simulation discovery-types discovery-formation muster-discovery muster-agent node-bbolt node-proto node-consensus node-etcd-config node-etcd-wal node-state node-engine node-api muster-node; do \
	  $(CARGO) check -p $$crate --locked || exit 1; done
	$(CARGO) clippy --release --workspace --bins --locked --quiet -- -D warnings
	@scripts/test

audit: ## advisories, licences, bans (cargo-deny; needs network)
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is missing: cargo install --locked cargo-deny"; exit 1; }
	cargo deny --workspace check

sim: setup ## seeded simulation of the node: make sim N=100000, or SEED=… to replay one history
	$(CARGO) run --release -q -p muster-tests --bin sim --locked -- $(if $(SEED),--seed $(SEED),--histories $(or $(N),20000))

explore: setup ## explore the bootstrap protocol: the ladder, full bounds, random walks (2 h)
	$(CARGO) run --release -q -p muster-tests --bin explore --locked -- --full

fuzz-etcd: release ## the same random requests to stock etcd and to muster-node: N=100000, or SEED=… to replay; ABOUT=keys|users|lines; MEMBERS=3 changes members
	@target/release/fuzz-etcd --requests $(or $(N),$(if $(MEMBERS),1000,20000)) $(if $(SEED),--seed $(SEED)) $(if $(ABOUT),--about $(ABOUT)) $(if $(MEMBERS),--members $(MEMBERS))

# What cargo-fuzz would pass, without what only a nightly compiler takes.
COVERAGE = --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
fuzz: ## bytes from outside, changed at random and guided by coverage, to one decoder: make fuzz T=peer_frame TIME=60 (T: fuzz/targets)
	@[ -f fuzz/targets/$(T).rs ] || { echo "make fuzz: T=TARGET is missing, one of:" $(sort $(basename $(notdir $(wildcard fuzz/targets/*.rs)))); exit 2; }
	@scripts/setup fuzz
	cd fuzz && RUSTFLAGS="$(COVERAGE)" $(CARGO) build -q --locked --target $(HOST) --bin $(T)
	mkdir -p fuzz/corpus/$(T)
	fuzz/target/$(HOST)/debug/$(T) fuzz/corpus/$(T) -max_total_time=$(or $(TIME),60) -max_len=$(or $(LEN),65536) -timeout=10 -artifact_prefix=fuzz/corpus/

mutants: setup ## a hundred small bugs that no tool would make, one at a time: which of them do the tests find? ONLY=4xx,110,601-618 or FILE=watch (tests/mutants/watch.txt)
	$(CARGO) run -q -p muster-tests --bin mutants --locked -- $(if $(ONLY),--only $(ONLY)) $(if $(FILE),--file $(FILE)) $(ARGS)

campaign: release ## all searches for faults in turns, then known bugs put back, and a report in target/campaign/REPORT.md: TIME=4h ARGS=--help
	@fuzz=; if command -v c++ >/dev/null && (cd fuzz && RUSTFLAGS="$(COVERAGE)" $(CARGO) build -q --locked --target $(HOST) --bins); then \
	  fuzz="--fuzz fuzz/target/$(HOST)/debug"; fi; \
	  exec target/release/campaign --time $(or $(TIME),4h) $$fuzz $(ARGS)

bench: release ## muster-node beside stock etcd, same client, same run (ARGS='--mode reconfigure': while members change; '--mode services': what watches, leases, keys, users cost)
	@target/release/bench $(ARGS)

bench-discovery: release ## what requests cost the discovery service, with up to 1,000,000 clusters, beside pgbench (ARGS='--clusters 1000,100000')
	@target/release/bench-discovery $(ARGS)

bench-replacement: release ## how soon a replacement policy makes a cluster whole after a host's death, in network namespaces, as root (ARGS='--runs 1 --nodes muster-node')
	@target/release/bench-replacement $(ARGS)

clean: ## remove what the build and the demo left behind
	$(CARGO) clean
	rm -rf .demo
