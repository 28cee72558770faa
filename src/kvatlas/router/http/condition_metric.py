"""What is wrong with the process, as a metric."""

from prometheus_client.core import GaugeMetricFamily

from kvatlas.schemas.conditions import Conditions


def condition_gauge(conditions: Conditions) -> GaugeMetricFamily:
    """Return 1 for each condition that is present, 0 for those that are over."""
    gauge = GaugeMetricFamily(
        "kv_condition", "1 while this is wrong; /readyz gives the reason", labels=["condition"]
    )
    for name, is_present in conditions.states.items():
        gauge.add_metric([name], float(is_present))
    return gauge
