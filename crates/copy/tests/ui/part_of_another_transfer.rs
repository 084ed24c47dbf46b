// error: E0133
use memferry_engine::{Completion, Descriptor};

fn reports(completion: std::sync::Arc<Completion>, descriptor: Descriptor) {
    descriptor.part_of(completion, 0).run();
}

fn main() {}
