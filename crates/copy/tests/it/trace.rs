//! Every step of a transfer is traced with `tracing`.

use std::sync::{Arc, Mutex};

use crate::common::ferry;
use memferry_copy::BatchItem;
use memferry_testing::in_own_process;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Log {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: Context<'_, S>,
    ) {
        self.0.lock().unwrap().push(format!("new {}", attributes.metadata().name()));
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = String::new();
        event.record(&mut |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            text.push_str(&format!("{value:?} "));
        });
        self.0.lock().unwrap().push(text);
    }

    fn on_close(&self, _: tracing::span::Id, _: Context<'_, S>) {
        self.0.lock().unwrap().push("closed".into());
    }
}

#[test]
fn the_span_of_a_transfer_is_closed_when_its_wait_returns() {
    if !in_own_process() {
        return;
    }
    let log = Log::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(log.clone()))
        .unwrap();
    let ferry = ferry();
    ferry.icopy(vec![1u8; 8192], vec![0u8; 8192]).unwrap().wait().unwrap();
    ferry.icopy(vec![1u8; 1 << 20], vec![0u8; 1 << 20]).unwrap().wait().unwrap();
    let (source, mut target) = (vec![1u8; 24_000], vec![0u8; 24_000]);
    let pairs = source.chunks(8000).zip(target.chunks_mut(8000));
    let items: Vec<_> = pairs
        .map(|(from, to)| BatchItem::copy(from.as_ptr(), to.as_mut_ptr(), from.len()))
        .collect();
    // SAFETY: both live until the copies are complete.
    let batch = unsafe { ferry.start_each_raw(&items) }.unwrap();
    batch.iter().for_each(|transfer| _ = transfer.wait().unwrap());
    assert!(target == source);
    // The ends are there when the waits return, and the handles of the batch do not hold them up.
    let log = log.0.lock().unwrap();
    let count = |what: &str| log.iter().filter(|line| line.contains(what)).count();
    assert_eq!((count("new transfer"), count("completed"), count("closed")), (5, 5, 5), "{log:?}");
}
