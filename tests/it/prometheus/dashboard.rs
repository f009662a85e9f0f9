//! The shipped dashboard and alert rules, compared with the table of metrics.

use super::*;

/// The unit and scale of a query's values. All queries of a panel must have the same unit and
/// scale, because they share one axis.
fn unit_of(query: &str) -> &'static str {
    let is_of = |unit: &str| query.contains(unit);
    match () {
        () if is_of("histogram_quantile(") && is_of("_seconds_bucket") => "seconds",
        () if is_of("histogram_quantile(") => "tokens",
        () if is_of("rate(") && is_of(") / sum") || is_of("_fds{") && is_of(" / ") => "share",
        () if is_of("rate(process_cpu_seconds_total") => "cores",
        () if is_of("rate(") && is_of("_tokens_total") => "tokens a second",
        () if is_of("rate(") => "a second",
        () if is_of("increase(") || is_of("changes(") => "times",
        () if is_of("start_time_seconds") => "moment",
        () if is_of("_bytes") => "bytes",
        () if is_of("_seconds") => "seconds",
        () if is_of("block_tokens") || is_of("target_tokens") => "tokens",
        () if is_of("bursar_permits") && is_of("permit=\"patches\"") => "patches",
        () if is_of("bursar_permits") && is_of("permit=\"sequences\"") => "sequences",
        () => "count",
    }
}

#[test]
fn no_dashboard_panel_mixes_units() {
    let dashboard: Value = serde_json::from_str(&read(shipped("dashboard.json"))).expect("JSON");
    let units = [
        ("bytes", &["bytes"][..]),
        ("seconds", &["s"]),
        ("share", &["percentunit"]),
        ("a second", &["ops", "reqps"]),
        ("tokens a second", &["short"]),
        ("times", &["short"]),
        ("tokens", &["short"]),
        ("patches", &["short"]),
        ("sequences", &["short"]),
        ("cores", &["short"]),
        ("moment", &["dateTimeAsIso"]),
        ("count", &["short"]),
    ];
    for panel in dashboard["panels"].as_array().expect("a list").iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().expect("a list");
        let found: BTreeSet<_> = targets.iter().map(|target| unit_of(target["expr"].as_str().expect("text"))).collect();
        let [unit] = found.iter().collect::<Vec<_>>()[..] else { panic!("{} mixes {found:?}", panel["title"]) };
        let known = units.iter().find(|(known, _)| known == unit).expect("the unit is listed above").1;
        let shown = panel["fieldConfig"]["defaults"]["unit"].as_str().expect("text");
        assert!(known.contains(&shown), "{} shows {unit} as {shown}", panel["title"]);
    }
    let titles: BTreeSet<_> = dashboard["panels"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|panel| &panel["title"])
        .map(Value::to_string)
        .collect();
    for title in ["Permits of sequences", "Permits of patches", "Leases that wait", "Leases refused a second"] {
        assert!(titles.contains(&format!("{title:?}")), "{title} has its own panel");
    }
}

/// The queries of a panel, with the dashboard's variables at their initial values.
pub(super) fn queries_of(title: &str) -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read(shipped("dashboard.json"))).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("a list");
    let panel = panels.iter().find(|panel| panel["title"] == title).unwrap_or_else(|| panic!("no panel {title}"));
    let targets = panel["targets"].as_array().expect("a list").iter();
    targets.map(|target| opened(target["expr"].as_str().expect("text"))).collect()
}

/// A query with the dashboard's variables at their initial values.
fn opened(query: &str) -> String {
    let all = ["$instance", "$device", "$model"].iter().fold(query.to_owned(), |query, name| query.replace(name, ".*"));
    all.replace("$__rate_interval", "1m").replace("$__range", "15m")
}

/// Every query of the dashboard, with its variables at their initial values.
pub(super) fn dashboard_queries() -> Vec<String> {
    fn collect(value: &Value, queries: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                queries.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| collect(value, queries));
            }
            Value::Array(values) => values.iter().for_each(|value| collect(value, queries)),
            _ => {}
        }
    }
    let dashboard = serde_json::from_str(&read(shipped("dashboard.json"))).expect("JSON");
    let mut queries = Vec::new();
    collect(&dashboard, &mut queries);
    assert!(queries.len() > 40, "expected more than 40 queries");
    queries.iter().map(|query| opened(query)).collect()
}

/// Each metric of Bursar or of its process that a text names, with the labels used.
fn named(text: &str) -> Vec<(String, BTreeSet<String>)> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let starts = ["bursar_", "process_"].iter().flat_map(|prefix| text.match_indices(prefix)).map(|(start, _)| start);
    let names = starts.filter(|start| *start == 0 || !is_word(text.as_bytes()[start - 1])).map(|start| {
        let rest = &text[start..];
        let (name, rest) = rest.split_at(rest.bytes().position(|byte| !is_word(byte)).unwrap_or(rest.len()));
        let selected =
            rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(selected, _)| selected);
        let labels = selected.split(',').filter_map(|part| part.split(['=', '!']).next()).map(str::trim);
        (name.to_owned(), labels.filter(|label| !label.is_empty()).map(str::to_owned).collect())
    });
    names.collect()
}

#[test]
fn shipped_files_name_only_metrics_and_labels_of_the_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = [shipped("dashboard.json"), shipped("alerts.yml"), shipped("README.md"), root.join("docs/budget.md")];
    // Labels that Prometheus adds to every series.
    let given = ["instance", "job", "le"];
    let mut seen = BTreeSet::new();
    for path in files {
        // JSON escapes quotes with a backslash.
        let text = read(&path).replace('\\', "");
        for (name, labels) in named(&text) {
            let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
            let row = TABLE.iter().find(|row| match of_histogram {
                Some(base) => row.name == base && row.kind == Kind::Histogram,
                None => row.name == name && (row.kind != Kind::Histogram || !path.ends_with("dashboard.json")),
            });
            let row = row.unwrap_or_else(|| panic!("{} names {name}, which is not recorded", path.display()));
            for label in labels {
                let has = row.labels.contains(&&*label) || given.contains(&&*label);
                assert!(has, "{} selects {name} by {label}, a label that it does not have", path.display());
            }
            seen.insert(row.name);
        }
        for (_, group) in text.split(" by (").skip(1).map(|rest| ((), rest.split(')').next().unwrap_or_default())) {
            for label in group.split(", ") {
                let has = given.contains(&label) || TABLE.iter().any(|row| row.labels.contains(&label));
                assert!(has, "{} groups by {label}", path.display());
            }
        }
    }
    // Every metric must be shown in some panel, alert or page.
    let unseen: Vec<_> = TABLE.iter().map(|row| row.name).filter(|name| !seen.contains(name)).collect();
    assert!(unseen.is_empty(), "neither dashboard, alerts nor docs/budget.md show {unseen:?}");
}
