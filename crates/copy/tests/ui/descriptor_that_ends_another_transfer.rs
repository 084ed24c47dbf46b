// error: E0133
use memferry_engine::{Completion, Descriptor};

fn ends(completion: std::sync::Arc<Completion>, descriptor: Descriptor) {
    descriptor.completes(completion).run();
}

fn main() {}
