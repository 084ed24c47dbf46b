//! The table of all keys, at the end of a report: value, meaning and, if requested, targets.

use std::fmt::Write;

use memferry_bench::results::outcome::Outcome;
use memferry_bench::results::summary_keys::{KeyResult, TargetStatus};

use super::html::escape;

/// The section with the keys of all outcomes; empty without keys.
pub(super) fn section(outcomes: &[Outcome], bars: bool) -> String {
    let mut rows = String::new();
    let (mut reached, mut judged_count) = (0, 0);
    let columns = if bars { 5 } else { 3 };
    for outcome in outcomes.iter().filter(|outcome| !outcome.summary.is_empty()) {
        let bench = escape(&outcome.bench);
        let _ = writeln!(
            rows,
            "<tr class=\"group\"><th colspan=\"{columns}\" scope=\"rowgroup\">\
             <a href=\"#{bench}\">{bench}</a></th></tr>"
        );
        for (key, value) in outcome.summary.iter() {
            let judged = outcome.judge(key, value);
            reached += u32::from(judged.status == TargetStatus::Reached);
            judged_count +=
                u32::from(matches!(judged.status, TargetStatus::Reached | TargetStatus::Missed));
            rows.push_str(&row(key, &judged, bars));
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let (count, head) = if bars {
        let count =
            format!(" <span class=\"count\">{reached} of {judged_count} bars reached</span>");
        (count, "<th class=\"n\">bar</th><th></th>")
    } else {
        (String::new(), "")
    };
    format!(
        "<section id=\"keys\">\n<h2>All keys{count}</h2>\n<div class=\"scroll\">\
         <table class=\"keys\">\n<thead><tr><th>key</th><th class=\"n\">value</th>{head}\
         <th>meaning</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n</section>\n"
    )
}

fn row(key: &str, judged: &KeyResult, bars: bool) -> String {
    let class = match judged.status {
        TargetStatus::Reached => "mark reached",
        TargetStatus::Missed => "mark missed",
        TargetStatus::NotJudged(_) => "note",
        TargetStatus::NoTarget => "",
    };
    let way = judged.better.map_or(String::new(), |better| {
        format!("<span class=\"way\" title=\"{}\">{}</span>", better.words(), better.arrow())
    });
    let target = if bars {
        format!(
            "<td class=\"n\">{}</td><td><span class=\"{class}\">{}</span></td>",
            escape(&judged.target),
            judged.status.text()
        )
    } else {
        String::new()
    };
    format!(
        "<tr><td><code>{}</code></td><td class=\"n strong\">{}{way}</td>{target}\
         <td class=\"meaning\">{}</td></tr>\n",
        escape(key),
        escape(&judged.value),
        escape(judged.meaning)
    )
}
