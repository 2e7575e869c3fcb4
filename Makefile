# make setup     packages and .venv, on a bare Debian 12
# make kernel    the UML kernel, into vmjobs/kernel: once, in some minutes
# make images    the same, and VM images into build/images
# make architectures   what building and running images for aarch64 and s390x needs
# make gateway-images   VM images of a grid gateway's machines, besides the worker's
# make grid      the grid in containers: nine services, ready when this returns
# make xen       the grid with one more node, a Xen host in QEMU: slow, but real
# make env       what a shell needs to use it: eval "$(make -s env)"
# make logs      what its services say;  make stop  stops them, make grid goes on
# make down      removes all of it: containers, volumes, networks, images, build/
# make demo      the main job: physics events from an array of VMs, a table and a picture
# make check     what to run all day: lint, unit tests, contract tests that start no process
# make lint      formatting, lints, types, shell scripts
# make test      lint, then all tests but those of make soak, on a grid of their own
# make release   source archive, wheel, Debian packages, container images and checksums of a tagged commit
# make lock      renews deploy/requirements*.txt: releases and hashes of the Python packages
# make soak      tests that take minutes each: what dies under clusters and jobs, builds of large images
# make soak-xen  tests on Xen hosts, which run in QEMU: of the driver, and of jobs on a grid's node
# make bench     benchmarks against the hypervisors and HTCondor alone: a table, and build/bench/*.json

.DELETE_ON_ERROR:
.PHONY: help setup architectures kernel images vm-images gateway-images foreign test-images soak-images grid xen env logs stop down clean lint check \
        test soak soak-xen demo bench lock release
SHELL := /bin/sh
BIN := .venv/bin
export VMJOBS_IMAGE_DIR := $(CURDIR)/build/images
# To compile all tests again in each of a run's processes would take longer than many tests.
export PYTHONDONTWRITEBYTECODE :=

help:
	@sed -n 's/^# make/make/p' Makefile

setup:
	@deploy/setup.sh

kernel: setup
	@images/uml/build.sh vmjobs/kernel

images: kernel vm-images

vm-images: setup
	@mkdir -p build/images
	@$(BIN)/vmjobs image build generic hep worker
	@find build/images ! -perm -o+r -exec chmod a+rX {} +

gateway-images: images
	@$(BIN)/vmjobs image build gateway-ce gateway-se gateway-ui
	@find build/images ! -perm -o+r -exec chmod a+rX {} +

grid: kernel
	@deploy/grid.sh up

xen: images
	@XEN=1 deploy/grid.sh up

env:
	@cat build/grid/env 2>/dev/null || { echo "the grid is not up: make grid" >&2; exit 1; }

logs stop:
	@deploy/grid.sh $@

down:
	@deploy/test.sh down
	@deploy/grid.sh down
	@rm -rf build

clean: down
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info

# What tests need besides: images that no part of vmjobs makes, for jobs that bring their own, and an S3 server.
foreign: setup
	@tests/foreign/build.sh bios trixie >/dev/null
	@deploy/s3-server.sh >/dev/null

test-images: images foreign

architectures:
	@deploy/setup.sh architectures

soak-images: test-images gateway-images architectures
	@$(BIN)/vmjobs image build bench generic-aarch64 generic-s390x
	@find build/images ! -perm -o+r -exec chmod a+rX {} +
	@tests/foreign/build.sh uefi cloud bullseye >/dev/null

lint: setup
	@$(BIN)/ruff format --check -q .
	@$(BIN)/ruff check -q .
	@$(BIN)/mypy
	@shellcheck images/uml/build.sh deploy/*.sh deploy/*/entry deploy/grid/api deploy/grid/await deploy/grid/healthy deploy/grid/install deploy/grid/secrets \
	    deploy/grid/standby deploy/project deploy/debian/*.postinst deploy/libexec/agent-start \
	    deploy/libexec/token-approve deploy/libexec/token-renew deploy/libexec/xen-card deploy/xen/dom0-start deploy/xen/dom0/usr/local/sbin/xen-host \
	    deploy/libexec/mmdebstrap deploy/libexec/mmdebstrap-as-root bench/vm-universe-xml condor/worker/*.sh vmjobs/agent/condor_job/inside/*.sh
	@shellcheck -x condor/gateway/*.sh tests/foreign/*.sh tests/foreign/guest/muons tests/foreign/guest/muons-init

check: lint
	@$(BIN)/pytest -q -n 3 tests/contract tests/unit -m quick

test: setup
	@deploy/test.sh

soak: setup
	@deploy/test.sh soak

soak-xen: setup
	@deploy/test.sh xen

demo: images grid
	@deploy/demo.sh

release: kernel architectures
	@deploy/release.sh

lock: setup
	@deploy/lock.sh

bench: images
	@deploy/bench.sh
