use std::time::{Duration, Instant};

use memferry_sys::stats::reader::{BlockView, FieldShape, FieldView, ProcessView};

use super::*;

fn process(pid: u32, name: &str, bytes: u64) -> ProcessView {
    let channel = |name: &str| BlockView {
        kind: "channel".into(),
        id: Some(0),
        name: name.into(),
        fields: vec![
            FieldView { name: "bytes".into(), shape: FieldShape::Counter, values: vec![bytes] },
            FieldView { name: "depth".into(), shape: FieldShape::Gauge, values: vec![3] },
        ],
    };
    let thread = BlockView {
        kind: "thread".into(),
        id: Some(1),
        name: "main".into(),
        fields: vec![FieldView {
            name: "copy_bytes".into(),
            shape: FieldShape::Labels(vec!["inline".into(), "single".into()]),
            values: vec![bytes, 0],
        }],
    };
    let blocks = (0..30).map(|n| channel(&format!("cpu {n}"))).chain([thread]).collect();
    ProcessView { pid, name: name.into(), blocks_without_place: 0, blocks }
}

fn screen(scale: u64) -> Screen {
    let sample = |seconds, times| Sample {
        at: Instant::now() + Duration::from_secs(seconds),
        unix_seconds: 0.0,
        processes: (1..=20)
            .map(|n| process(n, &format!("program-{n}"), times * u64::from(n) * scale))
            .collect(),
    };
    let args = TopArgs {
        pid: None,
        once: false,
        json: false,
        metrics: false,
        listen: None,
        interval: Duration::from_secs(1),
        sort: SortKey::CopyBytes,
    };
    let mut screen = Screen::new(sample(0, 1), &args);
    screen.update(sample(1, 2));
    screen
}

fn drawn(screen: &mut Screen, width: usize, height: usize) -> Vec<String> {
    let lines = screen.lines(width, height);
    assert_eq!(lines.len(), height);
    let text = |line: Line| line.0.iter().flat_map(|(_, text)| text.chars()).take(width).collect();
    lines.into_iter().map(text).collect()
}

#[test]
fn the_busiest_process_is_first_with_its_rate() {
    let lines = drawn(&mut screen(1 << 20), 80, 24);
    assert!(lines[0].starts_with("memferry top  20 processes  by copy-bytes"), "{}", lines[0]);
    assert!(lines[2].contains("program-20") && lines[2].contains("20.0M"), "{}", lines[2]);
    assert!(lines[23].starts_with("q quit"));
}

#[test]
fn the_selection_stays_in_view_in_any_size() {
    for (width, height) in [(200, 50), (80, 24), (40, 10), (20, 4), (1, 1), (3, 2)] {
        let mut screen = screen(1);
        for _ in 0..25 {
            screen.on_key(Key::Down);
            let _ = drawn(&mut screen, width, height);
        }
        let lines = drawn(&mut screen, width, height);
        if width >= 40 {
            assert!(lines.iter().any(|line| line.contains("program-1 ")), "{width}x{height}");
        }
        screen.on_key(Key::Enter);
        let _ = drawn(&mut screen, width, height);
    }
}

#[test]
fn a_process_opens_scrolls_and_closes() {
    let mut screen = screen(1);
    screen.on_key(Key::Enter);
    let lines = drawn(&mut screen, 100, 20);
    assert!(lines.iter().any(|line| line.starts_with("channels")));
    assert!(!lines.iter().any(|line| line.contains("cpu 29")));
    for _ in 0..10 {
        screen.on_key(Key::PageDown);
    }
    let lines = drawn(&mut screen, 100, 20);
    assert!(lines.iter().any(|line| line.contains("cpu 29")));
    assert_eq!(screen.on_key(Key::Escape), Step::Stay);
    assert!(screen.opened.is_none());
    assert_eq!(screen.on_key(Key::Escape), Step::Quit);
}

#[test]
fn the_order_changes_by_a_key() {
    let mut screen = screen(1);
    while screen.sort != SortKey::Pid {
        screen.on_key(Key::Char('S'));
    }
    assert_eq!(screen.rows[0].pid, 1);
    screen.on_key(Key::Char('S'));
    assert_eq!(screen.sort, SortKey::Fallbacks);
}

#[test]
fn a_process_that_ends_while_it_is_open_is_said_to_be_gone() {
    let mut screen = screen(1);
    screen.on_key(Key::Enter);
    screen.update(Sample { at: Instant::now(), unix_seconds: 0.0, processes: Vec::new() });
    assert!(drawn(&mut screen, 100, 5)[1].contains("has no counters"));
}

#[test]
fn every_column_is_explained_in_the_width_of_the_terminal() {
    let mut screen = screen(1000);
    let table = drawn(&mut screen, 80, 30);
    assert!(table.last().unwrap().contains("? columns"));
    assert_eq!(screen.on_key(Key::Char('?')), Step::Stay);
    for (width, height) in [(40, 40), (80, 24), (120, 24)] {
        let shown = drawn(&mut screen, width, height).join(" ");
        let words: Vec<_> = shown.split_whitespace().collect();
        let shown = words.join(" ");
        for (title, meaning) in columns::meanings() {
            let line = format!("{title} {meaning}");
            assert!(shown.contains(&line), "`{line}` is cut at a width of {width}");
        }
    }
    assert_eq!(screen.on_key(Key::Escape), Step::Stay);
    assert_eq!(drawn(&mut screen, 80, 30), table);
}
