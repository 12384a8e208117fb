#!/usr/bin/env bash
# Lints what deploys the server: the Dockerfile, compose.yaml, the manifest, the unit, alerts.
#
# promtool (Debian: prometheus) and systemd-analyze (systemd) are used where they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin

$bin/hadolint Dockerfile
$bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml deploy/compose.gpu.yaml
$bin/kubernetes-validate --strict --quiet deploy/kubernetes/streamserve.yaml

if command -v promtool >/dev/null; then
  promtool check config deploy/prometheus/prometheus.yml
  promtool test rules tests/deploy/alerts_test.yml
else
  echo "promtool is not here: alerts are not checked"
fi

if command -v systemd-analyze >/dev/null; then
  # The command of the unit need not be installed on this machine.
  unit=$(mktemp -d)
  trap 'rm -r "$unit"' EXIT
  sed 's#^ExecStart=[^ ]*#ExecStart=/bin/true#' deploy/systemd/streamserve.service > "$unit/streamserve.service"
  systemd-analyze verify "$unit/streamserve.service"
else
  echo "systemd-analyze is not here: the unit is not checked"
fi
