//! A subscriber of `tracing` that panics does not stop a channel.

use crate::common::builder;
use memferry_testing::in_own_process;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

struct Bomb;

impl<S: tracing::Subscriber> Layer<S> for Bomb {
    fn on_event(&self, _: &tracing::Event<'_>, _: Context<'_, S>) {
        panic!("on purpose");
    }
}

#[test]
fn transfers_end_although_the_subscriber_panics() {
    if !in_own_process() {
        return;
    }
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Bomb)).unwrap();
    let ferry = builder().channels(1).build().unwrap();
    for _ in 0..3 {
        let transfer = ferry.icopy(vec![7u8; 8192], vec![0u8; 8192]).unwrap();
        assert_eq!(transfer.wait().unwrap().1, vec![7u8; 8192]);
    }
}
