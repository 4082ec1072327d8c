// A view of a model that ends with the line.
// expect: it is a view: net must outlive it
#include "halftone/distributed/distributed.h"
#include "halftone/nn/nn.h"
using namespace halftone;
void f() { nn::DataParallel parallel(nn::Linear(2, 2), std::vector<Device>(2)); }
void g(const distributed::Group& group) { nn::DistributedDataParallel parallel(nn::Linear(2, 2), group); }
